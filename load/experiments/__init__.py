"""Each claim of the domain as one experiment that starts and stops what it needs."""
