"""Which layer is split how."""
