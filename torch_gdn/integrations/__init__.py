"""torch_gdn inside other libraries; each module here imports its library."""
