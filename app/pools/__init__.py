"""One engine class per pool: the engines, what they prove at the start, and what they report."""
