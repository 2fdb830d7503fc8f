"""Commands of torch_gdn, and the functions behind them."""
