"""Read and forward HTTP for hosts whose rules look into requests."""
