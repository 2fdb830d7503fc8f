"""Shows what can be shown about the Mac build without a Mac. `python -m evidence.proof` runs every check and prints a
table.
"""
