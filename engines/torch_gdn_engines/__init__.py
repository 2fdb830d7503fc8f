"""Plugins for vLLM and SGLang, which call torch_gdn's kernels. torch_gdn imports nothing from here but to start an
engine.
"""
