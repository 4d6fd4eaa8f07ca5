"""The fair queue: clients in turn, bounded waiting, cancellation."""

import asyncio
import random

import pytest

pytest.importorskip("fastapi")
from llmopt.runtime.server.admission import FairQueue
from llmopt.runtime.server.errors import ApiError


def run(scenario):
    return asyncio.run(scenario())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_clients_are_served_in_turn():
    async def scenario():
        queue, order = FairQueue(1, 100), []
        held = await queue.acquire("first")

        async def one(client, number):
            ticket = await queue.acquire(client)
            order.append((client, number))
            await asyncio.sleep(0)
            queue.release(ticket)

        flood = [asyncio.create_task(one("flood", i)) for i in range(20)]
        await settle()
        quiet = [asyncio.create_task(one("quiet", i)) for i in range(3)]
        await settle()
        queue.release(held)
        await asyncio.gather(*flood, *quiet)
        return order

    order = run(scenario)
    assert [place for place, (client, _) in enumerate(order) if client == "quiet"][-1] <= 6
    assert [number for client, number in order if client == "flood"] == list(range(20))


def test_who_holds_least_goes_first():
    async def scenario():
        queue = FairQueue(4, 100)
        held = [await queue.acquire("greedy") for _ in range(4)]
        waiting = [asyncio.create_task(queue.acquire(client)) for client in ("greedy", "greedy", "new")]
        await settle()
        queue.release(held.pop())
        await settle()
        return [task.done() for task in waiting], [task.cancel() for task in waiting]

    assert run(scenario)[0] == [False, False, True]


def test_a_full_queue_drops_from_the_longest():
    async def scenario():
        queue = FairQueue(1, 4)
        await queue.acquire("flood")
        flood = [asyncio.create_task(queue.acquire("flood")) for _ in range(4)]
        await settle()
        with pytest.raises(ApiError) as refused:
            await queue.acquire("flood")
        assert refused.value.status == 429
        quiet = asyncio.create_task(queue.acquire("quiet"))
        await settle()
        assert not quiet.done() and queue.num_waiting == 4
        assert [task.done() for task in flood] == [False, False, False, True]
        assert flood[-1].exception().status == 429
        [task.cancel() for task in [*flood, quiet]]

    run(scenario)


def test_a_large_request_is_not_overtaken():
    async def scenario():
        queue = FairQueue(4, 100)
        held = [await queue.acquire("a") for _ in range(4)]
        large = asyncio.create_task(queue.acquire("b", 4))
        await settle()
        small = asyncio.create_task(queue.acquire("c", 1))
        for ticket in held[:3]:
            queue.release(ticket)
        await settle()
        assert not large.done() and not small.done()
        queue.release(held[3])
        await settle()
        assert large.done() and not small.done()
        huge = FairQueue(2, 1)
        assert (await huge.acquire("a", 50)).held  # alone, it may
        small.cancel()

    run(scenario)


def test_nothing_is_lost_under_random_use():
    async def scenario():
        rng = random.Random(1)
        queue, running, most = FairQueue(5, 30), 0, 0
        outcomes = {"done": 0, "refused": 0, "cancelled": 0}

        async def one(client):
            nonlocal running, most
            try:
                ticket = await queue.acquire(client, rng.choice([1, 1, 2, 5]))
            except ApiError:
                outcomes["refused"] += 1
                return
            running += ticket.weight
            most = max(most, running)
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                running -= ticket.weight
                queue.release(ticket)
                queue.release(ticket)
            outcomes["done"] += 1

        tasks = []
        for _ in range(2000):
            tasks.append(asyncio.create_task(one(rng.choice("abcde"))))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        outcomes["cancelled"] = sum(isinstance(one, asyncio.CancelledError) for one in ended)
        assert sum(outcomes.values()) == 2000 and all(outcomes.values())
        assert queue.num_waiting == queue.num_held == running == 0 and not queue._queues and not queue._held
        assert most <= 5

    run(scenario)
