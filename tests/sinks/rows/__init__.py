"""Tests of the tables of databases."""
