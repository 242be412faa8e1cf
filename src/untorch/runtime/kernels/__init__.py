"""Python kernels for operators without a C shim, in numpy. Each module holds a KERNELS dictionary; see the registry."""
