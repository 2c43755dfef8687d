"""The verbs of the ``gascompile`` command, one module per family; each keeps heavy imports to its body."""
