"""Secret values: put into requests to their hosts, taken out of responses, and certificates for that."""
