"""The run-time half of untorch: programs, methods and the Python kernels behind them. Never imports torch."""
