"""Which kernel a call takes: tiles, macros and variants. Pure numbers, without PyTorch."""
