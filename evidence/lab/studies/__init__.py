"""Models of Apple's chips, and the accuracy of AURA: figures for docs/ that no user and no benchmark needs again.

`metal_model` bounds the kernels' times from the simulated device's counts, and `prefill_choice` compares the
prefill heuristic with it. Delete both, with their tests, once reports of `python -m torch_gdn check` have times of the
prefill algorithms on Macs, and the heuristic follows these.

`aura_quality`, with `format_quality` and `cache_formats`, makes tables and plots of docs/lab/cache-formats.md.
`kv_quality`, with `kv_formats` and `kv_models`, makes others of that page; its figures are in kv_quality.json.
`trellis_cost` makes tables of docs/numerics.md.
Delete them, with their tests, when AURA's codebooks and schemes no longer change.

`lloyd_max` and `trellis_training` compute the tables of `torch_gdn.aura`, and stay. `fla_tests` and `fla_stages`
compare torch_gdn with FLA, and `training_layer` times a training step; they stay as long as these functions do.
"""
