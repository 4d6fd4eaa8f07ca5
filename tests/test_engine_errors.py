"""A failure at any stage ends its own request, once, with `error`; the others' texts are what they would be anyway."""

import pytest
from llmopt.runtime.engine import step_results
from llmopt.runtime.engine.engine import Engine
from llmopt.runtime.engine.fake_runner import FakeRunner, greedy_continuation
from llmopt.runtime.engine.loop import collect_outputs
from llmopt.runtime.engine.outputs import join_outputs
from llmopt.runtime.engine.plan import Row, StepPlan
from llmopt.runtime.engine.recovery import execute_surviving
from llmopt.runtime.engine.sampling_params import SamplingParams
from llmopt.runtime.engine.scheduler_config import SchedulerConfig

V, COUNT = 64, 12


class Boom(Exception):
    pass


def make(**options):
    runner = options.pop("runner", None) or FakeRunner(vocab_size=V, fault=options.pop("fault", None))
    return Engine(runner, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), **options)


def add_three(engine, culprit="b", **only_for_culprit):
    for i, name in enumerate("abc"):
        options = only_for_culprit if name == culprit else {}
        params = SamplingParams(temperature=0.0, max_new_tokens=COUNT)
        engine.add_request([i + 1, 7], params, request_id=name, **options)


def check(engine, outputs, culprits=("b",), tokens_of_culprit=None):
    """Everybody ended once; only the culprits with `error`; nothing is leaked; the engine goes on."""
    done = join_outputs(outputs)
    assert {key for key, _ in done} == set("abc")
    for i, name in enumerate("abc"):
        assert sum(o.finished for o in outputs if o.request_id == name) == 1
        assert outputs[max(j for j, o in enumerate(outputs) if o.request_id == name)].finished
        expected = greedy_continuation([i + 1, 7], COUNT, V)
        completion = done[name, 0]
        if name in culprits:
            assert completion.finish_reason == "error" and isinstance(completion.error, Boom)
            assert completion.token_ids == expected[: len(completion.token_ids)]
            if tokens_of_culprit is not None:
                assert len(completion.token_ids) == tokens_of_culprit
        else:
            assert completion.finish_reason == "length" and completion.token_ids == expected
            assert completion.error is None
    assert engine.scheduler.pool.num_free == engine.runner.num_blocks and not engine.has_work
    engine.runner.fault = None
    engine.add_request([9], SamplingParams(temperature=0.0, max_new_tokens=3), request_id="after")
    after = join_outputs(collect_outputs(engine))["after", 0]
    assert after.token_ids == greedy_continuation([9], 3, V)


def id_of(engine, name):
    return next(iter(engine._groups[name].live))


def test_add(monkeypatch):
    engine = make()
    original = engine.scheduler.add

    def add(request, **options):
        if request.request_id == "b":
            raise Boom
        original(request, **options)

    monkeypatch.setattr(engine.scheduler, "add", add)
    add_three(engine)
    check(engine, collect_outputs(engine), tokens_of_culprit=0)


@pytest.mark.parametrize("at", [0, 5])
def test_forward(at):
    """Of the whole batch, whenever the culprit's row is in it; halving finds it."""
    engine = make()
    add_three(engine)
    number = id_of(engine, "b")
    engine.runner.fault = lambda row: Boom() if row.request_id == number and row.end >= 2 + at else None
    check(engine, collect_outputs(engine), tokens_of_culprit=at)


def test_forward_that_fails_only_as_a_whole():
    """Out of memory, say: the rows succeed alone, nobody ends, and no token is lost or doubled."""
    engine = make()

    class Narrow(FakeRunner):
        def execute(self, plan):
            if len(plan.rows) > 1:
                raise MemoryError("too large")
            return super().execute(plan)

    engine = make(runner=Narrow(vocab_size=V))
    add_three(engine)
    check(engine, collect_outputs(engine), culprits=())


def test_forward_that_always_fails():
    engine = make(fault=lambda row: Boom())
    add_three(engine)
    check(engine, collect_outputs(engine), culprits=tuple("abc"), tokens_of_culprit=0)


def test_the_culprit_is_found_by_halving():
    runner = FakeRunner(fault=lambda row: Boom() if row.request_id == 5 else None)
    rows = tuple(Row(i, 0, (i,), (i,), 1) for i in range(16))
    survived, logits, culprits = execute_surviving(runner, StepPlan(rows))
    assert [row.request_id for row in survived.rows] == [i for i in range(16) if i != 5]
    assert [row.request_id for row, _ in culprits] == [5]
    assert runner.num_executions == 1 + 2 * 4
    assert logits.argmax(-1).tolist() == [greedy_continuation([i], 1, 64)[0] for i in range(16) if i != 5]


def test_sample(monkeypatch):
    original = step_results.sample

    def sample(logits, items):
        if any(i.request.request_id == "b" and i.request.num_output_tokens == 4 for i in items):
            raise Boom
        return original(logits, items)

    monkeypatch.setattr(step_results, "sample", sample)
    engine = make()
    add_three(engine)
    check(engine, collect_outputs(engine), tokens_of_culprit=4)


def test_logits_that_are_not_finite():
    class Poisoned(FakeRunner):
        def execute(self, plan):
            logits = super().execute(plan)
            for i, row in enumerate(plan.rows):
                if row.request_id == self.poisoned and row.end > 4:
                    logits[i] = float("nan")
            return logits

    engine = make(runner=Poisoned(vocab_size=V))
    add_three(engine)
    engine.runner.poisoned = id_of(engine, "b")
    outputs = collect_outputs(engine)
    done = join_outputs(outputs)
    assert "not finite" in str(done["b", 0].error) and len(done["b", 0].token_ids) == 3
    assert done["a", 0].finish_reason == done["c", 0].finish_reason == "length"


class Tokenizer:
    """One letter an id; raises at will."""

    poison = None

    def decode(self, token_ids, **_):
        if self.poison in token_ids:
            raise Boom
        return "".join(chr(33 + i) for i in token_ids)


def test_detokenize():
    tokenizer = Tokenizer()
    engine = make(tokenizer=tokenizer)
    add_three(engine)
    texts = [greedy_continuation([i + 1, 7], COUNT, V) for i in range(3)]
    place = next(i for i, t in enumerate(texts[1]) if t not in texts[0] + texts[2])
    tokenizer.poison = texts[1][place]
    outputs = collect_outputs(engine)
    tokenizer.poison = None
    check(engine, outputs, tokens_of_culprit=place)


@pytest.mark.parametrize("at", [1, 6, COUNT])
def test_callback(at):
    """The news that a callback chokes on is delivered; what follows it is the end."""
    calls = []

    def on_output(output):
        calls.append(output)
        if output.num_output_tokens == at and output.new_token_ids:
            raise Boom

    engine = make()
    add_three(engine, on_output=on_output)
    outputs = collect_outputs(engine)
    if at < COUNT:
        check(engine, outputs, tokens_of_culprit=at)
    else:  # it had ended already
        check(engine, outputs, culprits=())
    assert calls == [o for o in outputs if o.request_id == "b"]


class Drafter:
    def __init__(self, stage, engine_box):
        self.stage, self.box = stage, engine_box

    def _maybe(self, stage, request):
        if stage == self.stage and request.request_id == "b" and request.num_output_tokens >= 3:
            raise Boom

    def propose(self, requests):
        for request in requests:
            self._maybe("propose", request)
        return [greedy_continuation(r.token_ids, 1, V) for r in requests]

    def observe(self, request, num_drafts, num_accepted):
        self._maybe("observe", request)

    def forget(self, request):
        pass


@pytest.mark.parametrize("stage", ["propose", "observe"])
def test_drafter(stage):
    engine = make(drafter=Drafter(stage, None))
    add_three(engine)
    check(engine, collect_outputs(engine))


@pytest.mark.parametrize("where", ["schedule", "commit", "expired"])
def test_the_engines_own_fault_ends_all_and_leaves_it_usable(monkeypatch, where):
    """Nobody hangs, no block is lost, and what was only queued is served."""
    engine = make()
    add_three(engine)
    outputs = engine.step()

    def broken(*_):
        engine.add_request([9], SamplingParams(temperature=0.0, max_new_tokens=3), request_id="queued")
        raise Boom

    monkeypatch.setattr(engine.scheduler, where, broken)
    outputs += engine.step()
    ended = [o for o in outputs if o.finished]
    assert [(o.request_id, o.finish_reason) for o in ended] == [(name, "error") for name in "abc"]
    assert all(isinstance(o.error, Boom) for o in ended)
    done = join_outputs(collect_outputs(engine))
    assert done["queued", 0].token_ids == greedy_continuation([9], 3, V)
    check(engine, outputs, culprits=tuple("abc"))


def test_wrong_logits_shape_is_said():
    class Wrong(FakeRunner):
        def execute(self, plan):
            return super().execute(plan)[:, :5]

    engine = make(runner=Wrong(vocab_size=V))
    add_three(engine)
    outputs = collect_outputs(engine)
    assert [o.finish_reason for o in outputs if o.finished] == ["error"] * 3
    assert "logits of shape (3, 5)" in str(outputs[-1].error)


def test_siblings_end_with_the_sequence_they_wait_for():
    engine = make(fault=lambda row: Boom())
    engine.add_request([1], SamplingParams(n=3, max_new_tokens=4), request_id="n")
    outputs = collect_outputs(engine)
    assert sorted((o.index, o.finish_reason) for o in outputs) == [(i, "error") for i in range(3)]
    engine.runner.fault = None
    engine.add_request([1], SamplingParams(n=3, max_new_tokens=4), request_id="n")
    assert sum(o.finished for o in collect_outputs(engine)) == 3
