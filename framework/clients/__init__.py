"""What clients of other systems have in common: settings, secrets, and what their errors mean."""
