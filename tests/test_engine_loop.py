"""The loop thread: handles for threads and asyncio, abort on disconnect, and no thread left."""

import asyncio
import threading
import time

import pytest
from llmopt.optimizer.errors import RunError, UsageError
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner, greedy_continuation
from llmopt.runtime.engine.loop import EngineLoop
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

V = 64
WAIT = 60.0


class Gated(FakeRunner):
    """Executes only while its gate is open."""

    def __init__(self, **options):
        super().__init__(vocab_size=V, **options)
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan):
        assert self.gate.wait(WAIT)
        return super().execute(plan)


def make(**options):
    return EngineLoop(Engine(Gated(**options), scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)))


def engine_threads():
    return [t for t in threading.enumerate() if t.name == "llmopt-engine"]


@pytest.fixture
def loop():
    with make() as running:
        yield running
    assert not engine_threads()


def greedy(**values):
    return SamplingParams(temperature=0.0, **values)


def until(condition):
    end = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it never happened")
        time.sleep(0.001)


def test_result(loop):
    handles = [loop.submit([i, i], greedy(max_new_tokens=10)) for i in range(12)]
    for i, handle in enumerate(handles):
        [done] = handle.result(WAIT)
        assert done.token_ids == greedy_continuation([i, i], 10, V) and done.finish_reason == "length"
        assert handle.done


def test_stream(loop):
    outputs = list(loop.submit([1], greedy(max_new_tokens=6, n=2)))
    for index in (0, 1):
        mine = [o for o in outputs if o.index == index]
        assert [t for o in mine for t in o.new_token_ids] == greedy_continuation([1], 6, V)
        assert [o.finished for o in mine] == [False] * 5 + [True]


def test_submit_from_many_threads(loop):
    results = {}

    def work(i):
        results[i] = [loop.submit([i], greedy(max_new_tokens=5)).result(WAIT)[0].token_ids for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == {i: [greedy_continuation([i], 5, V)] * 5 for i in range(8)}


def test_asyncio(loop):
    async def stream(i):
        return [t async for o in loop.submit([i], greedy(max_new_tokens=8)) for t in o.new_token_ids]

    async def whole(i):
        [done] = await loop.submit([i], greedy(max_new_tokens=8)).aresult()
        return done.token_ids

    async def main():
        return await asyncio.gather(*[stream(i) for i in range(5)], *[whole(i) for i in range(5)])

    assert asyncio.run(main()) == [greedy_continuation([i], 8, V) for i in range(5)] * 2


def test_cancelling_a_task_aborts_its_request(loop):
    async def main():
        handle = loop.submit([1], greedy(max_new_tokens=100))
        loop.engine.runner.gate.clear()
        task = asyncio.create_task(handle.aresult())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.engine.runner.gate.set()
        return await asyncio.to_thread(handle.result, WAIT)

    [done] = asyncio.run(main())
    assert done.finish_reason == "abort"
    until(lambda: loop.engine.metrics().kv_cache_usage_perc == 0)


def test_leaving_a_stream_aborts_it(loop):
    runner = loop.engine.runner
    execute = runner.execute
    runner.execute = lambda plan: time.sleep(0.02) or execute(plan)  # so that the stream is left long before its end
    handle = loop.submit([1], greedy(max_new_tokens=100))
    for output in handle:
        assert output.new_token_ids
        runner.gate.clear()
        break
    loop.engine.runner.gate.set()
    [done] = handle.result(WAIT)
    assert done.finish_reason == "abort"


def test_an_event_loop_that_is_gone_hurts_nobody(loop):
    loop.engine.runner.gate.clear()
    handle = loop.submit([1], greedy(max_new_tokens=3))

    async def wait_a_little():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(aiter(handle)), 0.01)

    asyncio.run(wait_a_little())
    loop.engine.runner.gate.set()
    assert loop.submit([2], greedy(max_new_tokens=3)).result(WAIT)[0].finish_reason == "length"


def test_errors_come_through_the_handle_and_refusals_at_once(loop):
    with pytest.raises(UsageError, match="outside the vocabulary"):
        loop.submit([V], greedy())
    loop.engine.runner.fault = lambda row: ValueError("bad row") if row.token_ids[0] == 13 else None
    [bad] = loop.submit([13], greedy(max_new_tokens=3)).result(WAIT)
    assert bad.finish_reason == "error" and str(bad.error) == "bad row"
    [good] = loop.submit([14], greedy(max_new_tokens=1)).result(WAIT)
    assert good.finish_reason == "length" and loop.healthy


def test_deadline(loop):
    loop.engine.runner.gate.clear()
    handle = loop.submit([1], greedy(max_new_tokens=100), deadline=time.monotonic() + 0.01)
    time.sleep(0.02)
    loop.engine.runner.gate.set()
    assert handle.result(WAIT)[0].finish_reason == "deadline"


def test_timeout_leaves_the_request_alone(loop):
    loop.engine.runner.gate.clear()
    handle = loop.submit([1], greedy(max_new_tokens=2))
    with pytest.raises(TimeoutError, match="has not ended after"):
        handle.result(0.01)
    loop.engine.runner.gate.set()
    assert handle.result(WAIT)[0].finish_reason == "length"


def test_stop_parks_and_start_goes_on():
    loop = make()
    handle = loop.submit([1], greedy(max_new_tokens=50))
    assert not loop.healthy and not handle.done
    loop.start()
    loop.start()
    assert len(engine_threads()) == 1
    loop.stop()
    loop.stop()
    assert not engine_threads()
    loop.start()
    assert handle.result(WAIT)[0].token_ids == greedy_continuation([1], 50, V)
    loop.close()
    assert not engine_threads()


def test_close_ends_everything():
    loop = make()
    loop.start()
    loop.engine.runner.gate.clear()
    handles = [loop.submit([i], greedy(max_new_tokens=100)) for i in range(20)]
    threading.Timer(0.02, loop.engine.runner.gate.set).start()
    loop.close()
    loop.close()
    assert not engine_threads() and loop.engine.runner.closed and not loop.healthy
    assert {h.result(WAIT)[0].finish_reason for h in handles} == {"abort"}
    with pytest.raises(RunError, match="closed"):
        loop.submit([1], greedy())
    with pytest.raises(RunError, match="closed"):
        loop.start()


def test_what_is_not_an_exception_ends_the_loop_and_says_so():
    class Fatal(BaseException):
        pass

    loop = make(fault=lambda row: Fatal("out"))
    loop.start()
    handle = loop.submit([1], greedy(max_new_tokens=3))
    assert handle.result(WAIT)[0].finish_reason == "abort"
    until(lambda: not engine_threads())
    assert not loop.healthy
    with pytest.raises(RunError, match="has failed"):
        loop.submit([1], greedy())
    loop.close()


def test_an_idle_loop_sleeps(loop):
    loop.submit([1], greedy(max_new_tokens=1)).result(WAIT)
    steps = loop.engine.metrics().steps_total
    executions = loop.engine.runner.num_executions
    time.sleep(0.05)
    assert (loop.engine.metrics().steps_total, loop.engine.runner.num_executions) == (steps, executions)
