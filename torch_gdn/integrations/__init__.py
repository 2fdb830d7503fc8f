"""torch_gdn inside other libraries. Each module here imports its library."""
