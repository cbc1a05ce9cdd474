"""Ratios against bare Python and real peers, measured in one run, alternately, so that the machine cancels out."""
