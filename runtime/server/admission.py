"""Who gets the engine's next free place: clients in turn, and a bound on all that wait."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from .errors import ApiError

RETRY_SECONDS = 2


@dataclass(eq=False)
class Ticket:
    """A place in the engine for `weight` sequences of one client. Give it back with `FairQueue.release`."""

    client: str
    weight: int
    granted: asyncio.Future[None] = field(repr=False)
    held: bool = False


class FairQueue:
    """Places for `capacity` sequences, handed to the client that holds the fewest (max-min fairness).

    Among clients that hold equally many the one whose turn is longest ago is served, and a client's own requests in
    their order. Nobody starves: a client that waits with nothing running is behind only those who hold nothing either,
    and each of these moves behind it once served.

    At most `max_waiting` requests wait. When they do, a newcomer takes the place of the newest request of the client
    with the longest queue if that is longer than its own would be (longest-queue drop), else it is refused. So one
    client that floods the server cannot shut the others out.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.capacity, self.max_waiting = capacity, max_waiting
        self.num_waiting = 0
        self._held: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Sequences that have a place."""
        return sum(self._held.values())

    async def acquire(self, client: str, weight: int = 1) -> Ticket:
        """Wait for a place. Raises ApiError 429 where the queue is full, or becomes so for this client.

        Cancelling it gives up the turn. A weight above the capacity waits until the engine is empty.
        """
        ticket = Ticket(client, max(1, weight), asyncio.get_running_loop().create_future())
        if not self.num_waiting and self._fits(ticket):
            self._grant(ticket)
            return ticket
        if self.num_waiting >= self.max_waiting:
            self._make_room(client)
        self._queues.setdefault(client, deque()).append(ticket)
        self.num_waiting += 1
        self._pump()
        try:
            await ticket.granted
        except BaseException:
            self.release(ticket)
            raise
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Give the place back, or leave the queue. Safe to call twice."""
        if ticket.held:
            ticket.held = False
            self._held[ticket.client] -= ticket.weight
            if not self._held[ticket.client]:
                del self._held[ticket.client]
        else:
            self._remove(ticket)
        self._pump()

    def resize(self, capacity: int) -> None:
        """Another engine, another number of places. Those that are held stay held."""
        self.capacity = capacity
        self._pump()

    def _make_room(self, client: str) -> None:
        longest = max(self._queues, key=lambda name: len(self._queues[name]), default=client)
        if not self._queues or len(self._queues[longest]) <= len(self._queues.get(client, ())) + 1:
            raise queue_full(self.max_waiting)
        victim = self._queues[longest][-1]
        self._remove(victim)
        victim.granted.set_exception(queue_full(self.max_waiting))

    def _remove(self, ticket: Ticket) -> None:
        queue = self._queues.get(ticket.client)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            self.num_waiting -= 1
            if not queue:
                del self._queues[ticket.client]

    def _pump(self) -> None:
        while self._queues:
            client = min(self._queues, key=lambda name: self._held[name])  # the first of equals: the order is by turn
            ticket = self._queues[client][0]
            if not self._fits(ticket):
                return  # whoever's turn it is waits for room: large requests are not overtaken for ever
            self._remove(ticket)
            if client in self._queues:
                self._queues.move_to_end(client)
            self._grant(ticket)

    def _fits(self, ticket: Ticket) -> bool:
        held = self.num_held
        return held == 0 or held + ticket.weight <= self.capacity

    def _grant(self, ticket: Ticket) -> None:
        ticket.held = True
        self._held[ticket.client] += ticket.weight
        if not ticket.granted.done():
            ticket.granted.set_result(None)


def queue_full(limit: int) -> ApiError:
    return ApiError(
        429,
        f"{limit} requests are waiting already; try again later",
        code="queue_full",
        reason="queue_full",
        retry_after=RETRY_SECONDS,
    )
