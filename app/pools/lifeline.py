"""Ends vLLM's processes with the replica that started them.

vLLM 0.29.0 loads this as a plugin in each of its processes (entry point `vllm.general_plugins` in
pyproject.toml). Without it a replica that is killed leaves its engine behind, holding its memory.
"""

import multiprocessing
import os
import threading


def follow_parent() -> None:
    """End this process when its parent has ended; does nothing in a process that has none."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="follow-parent", daemon=True).start()
