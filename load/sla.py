"""Whether chat keeps its SLA beside batch work, measured on a running server.

`python -m load.sla SCENARIO --url URL` prints one JSON object. Scenarios: `interference` (chat
alone, then beside a full backlog of documents), `burst` (exactly the free slots at once, then one
more), `overnight` (no chat and a backlog, then chat returns), `mixed` (chat a third of the time,
backlog always).
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp

from load.client import TIMEOUT_S, Record, Sender, Work

CHAT = Work("chat", prompt_tokens=40, output_tokens=24)
DOCUMENT = Work("batch", prompt_tokens=1500, output_tokens=64, tier="flex", stream=False)
# Short enough to borrow a slot of the latency pool under local.yaml.
LINE = Work("batch", prompt_tokens=200, output_tokens=64, tier="flex", stream=False)
CHAT_PER_S = 0.5


def p95(values: list[float]) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)]


def chat_figures(records: list[Record]) -> dict[str, Any]:
    """Refuses a run in which nothing was answered: an empty p95 would look like a good one."""
    good = [r for r in records if r.status == 200 and r.ttft_s is not None]
    if not good:
        raise RuntimeError(f"no chat was answered: {Counter(r.status for r in records)}")
    ttft = [r.ttft_s for r in good if r.ttft_s is not None]
    tpot = [r.tpot_s for r in good if r.tpot_s is not None]
    return {
        "requests": len(records),
        "statuses": dict(Counter(str(r.status) for r in records)),
        "pools": dict(Counter(str(r.pool) for r in good)),
        "ttft_p50_ms": round(1000 * statistics.median(ttft)),
        "ttft_p95_ms": round(1000 * p95(ttft)),
        "tpot_p50_ms": round(1000 * statistics.median(tpot)),
    }


def batch_figures(records: list[Record], begin_s: float, end_s: float) -> dict[str, Any]:
    """Output tokens of the requests that ended within the time, per second of it."""
    ended = [r for r in records if begin_s <= r.done_s <= end_s]
    return {
        "requests": len(ended),
        "statuses": dict(Counter(str(r.status) for r in ended)),
        "pools": dict(Counter(str(r.pool) for r in ended)),
        "output_tokens_per_s": round(sum(r.output_tokens for r in ended) / (end_s - begin_s), 1),
    }


async def chats(
    sender: Sender, seconds: float, seed: random.Random, most: int = 10_000
) -> list[Record]:
    """Open loop: Poisson arrivals, sent when they are due whatever became of the others."""
    tasks: list[asyncio.Task[Record]] = []
    due = sender.now_s()
    end = due + seconds
    while len(tasks) < most and (due := due + seed.expovariate(CHAT_PER_S)) < end:
        await asyncio.sleep(due - sender.now_s())
        tasks.append(asyncio.create_task(sender.send(CHAT, seed)))
    return list(await asyncio.gather(*tasks))


@contextlib.asynccontextmanager
async def backlog(
    sender: Sender, work: Work, in_flight: int, seed: random.Random
) -> AsyncIterator[list[Record]]:
    """So many requests in flight at any time; gives the records of those that ended."""
    records: list[Record] = []

    async def one() -> None:
        while True:
            record = await sender.send(work, seed)
            records.append(record)
            if record.status != 200:
                await asyncio.sleep(1)

    tasks = [asyncio.create_task(one()) for _ in range(in_flight)]
    try:
        yield records
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def interference(sender: Sender, options: argparse.Namespace) -> dict[str, Any]:
    seed = random.Random(options.seed)
    await chats(sender, 10, seed)
    alone = chat_figures(await chats(sender, options.seconds, seed))
    async with backlog(sender, DOCUMENT, options.in_flight, seed) as records:
        await asyncio.sleep(options.settle)
        begun = sender.now_s()
        beside = chat_figures(await chats(sender, options.seconds, seed))
        batch = batch_figures(records, begun, sender.now_s())
    ratio = beside["ttft_p95_ms"] / alone["ttft_p95_ms"]
    return {"alone": alone, "beside": beside, "batch": batch, "ttft_p95_ratio": round(ratio, 2)}


async def burst(sender: Sender, options: argparse.Namespace) -> dict[str, Any]:
    """`most_waiting` is the engine's own count of waiting sequences."""
    seed = random.Random(options.seed)
    await asyncio.gather(*(sender.send(CHAT, seed) for _ in range(2)))
    slots = (await sender.pools())[options.pool]["slots"]
    exact, waiting = await _watched(sender, options.pool, slots, seed)
    more, waiting_more = await _watched(sender, options.pool, slots + 1, seed)
    return {
        "slots": slots,
        "exactly_the_slots": {**chat_figures(exact), "most_waiting": waiting},
        "one_more": {**chat_figures(more), "most_waiting": waiting_more},
    }


async def _watched(
    sender: Sender, pool: str, count: int, seed: random.Random
) -> tuple[list[Record], int]:
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, (await sender.pools())[pool]["waiting"])
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    records = list(await asyncio.gather(*(sender.send(CHAT, seed) for _ in range(count))))
    watching.cancel()
    return records, most


async def overnight(sender: Sender, options: argparse.Namespace) -> dict[str, Any]:
    """After a quiet while a backlog comes; `lent_after_s` later all that may be lent is lent.

    `with_borrowing` are the first chats then, `without_borrowing` as many beside documents that
    are too long to borrow."""
    seed = random.Random(options.seed)
    await chats(sender, 10, seed)
    async with backlog(sender, DOCUMENT, options.in_flight, seed):
        await asyncio.sleep(options.settle)
        without = await _first_chats(sender, options.seed)
    await _until_idle(sender)
    await asyncio.sleep(options.seconds)
    to_lend = (await sender.pools())[options.pool]["lendable_slots"]
    async with backlog(sender, LINE, options.in_flight, seed) as records:
        begun = sender.now_s()
        while (await sender.pools())[options.pool]["lent_slots"] < max(1, to_lend):
            if sender.now_s() - begun > options.seconds:
                raise RuntimeError(f"not all of {to_lend} slots were lent")
            await asyncio.sleep(0.1)
        lent_after_s = sender.now_s() - begun
        await asyncio.sleep(options.seconds)
        lent = (await sender.pools())[options.pool]
        beside = await _first_chats(sender, options.seed)
        counts = (await sender.pools())[options.pool]["counts"]
    ratio = beside["ttft_p95_ms"] / without["ttft_p95_ms"]
    return {
        "lent_after_s": round(lent_after_s, 1),
        "lent_slots": lent["lent_slots"],
        "without_borrowing": without,
        "with_borrowing": beside,
        "ttft_p95_ratio": round(ratio, 2),
        "counts": counts,
        "batch": batch_figures(records, begun, sender.now_s()),
    }


async def _first_chats(sender: Sender, seed: int) -> dict[str, Any]:
    """Twenty, at the same pace every time."""
    return chat_figures(await chats(sender, 120, random.Random(seed), most=20))


async def _until_idle(sender: Sender, limit_s: float = 120.0) -> None:
    end = sender.now_s() + limit_s
    while any(row["running"] for row in (await sender.pools()).values()):
        if sender.now_s() > end:
            raise RuntimeError("the server did not come to rest")
        await asyncio.sleep(0.5)


async def mixed(sender: Sender, options: argparse.Namespace) -> dict[str, Any]:
    """Three rounds; chat comes in the last third of each."""
    seed = random.Random(options.seed)
    await chats(sender, 10, seed)
    heard: list[Record] = []
    async with backlog(sender, LINE, options.in_flight, seed) as records:
        await asyncio.sleep(options.settle)
        begun = sender.now_s()
        for _ in range(3):
            await asyncio.sleep(options.seconds * 2 / 3)
            heard += await chats(sender, options.seconds / 3, seed)
        batch = batch_figures(records, begun, sender.now_s())
    return {"chat": chat_figures(heard), "batch": batch}


SCENARIOS: dict[
    str, Callable[[Sender, argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]]
] = {
    "interference": interference,
    "burst": burst,
    "overnight": overnight,
    "mixed": mixed,
}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await SCENARIOS[options.scenario](Sender(options.url, session), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measured part")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds of backlog before it")
    parser.add_argument("--in-flight", type=int, default=24, help="batch requests at any time")
    parser.add_argument("--pool", default="latency", help="the pool that serves chat")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(run(options)), indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
