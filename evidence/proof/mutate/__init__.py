"""Plants faults in the kernels, one at a time, and sees whether a test fails: docs/lab/mutation.md has the counts."""
