"""What async callers hold. The source of ringfence._sync, which scripts/unasync generates from it."""
