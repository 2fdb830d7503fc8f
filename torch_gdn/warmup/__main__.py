import sys

sys.exit(
    "torch_gdn.warmup is a function, not a command: kernels are compiled for the process that they run in. Call\n"
    "torch_gdn.warmup(model) in your program, once the model is loaded and torch_gdn.enable() was called."
)
