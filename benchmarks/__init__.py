"""Compare Ringfence with bare Python and other programs: both are measured alternately, in one run, on one machine."""
