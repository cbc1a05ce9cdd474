"""Tests as a product: what any backend must do, for ours and for anyone's."""
