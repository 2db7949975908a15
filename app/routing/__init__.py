"""Where a request goes: pure functions of its class and of what the pools said last."""
