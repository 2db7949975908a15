"""The benchmark: speaks HTTP only, and is never imported by app."""
