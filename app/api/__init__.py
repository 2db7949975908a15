"""HTTP in, HTTP out; the only folder that imports starlette."""
