"""What sync callers hold. Generated from ringfence._async by scripts/unasync, except link.py and waiting.py."""
