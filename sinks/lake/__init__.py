"""Tables of files: Parquet with manifests, and Delta Lake."""
