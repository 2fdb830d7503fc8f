"""What can be shown of the Mac build without a Mac. `python -m proof` runs every check and prints one table."""
