"""Mutated bodies: every answer is a proper one, the engine lives on. benchmarks/serve_fuzz.py sends ten thousand."""

import random

import pytest

pytest.importorskip("fastapi")
from llmopt.benchmarks.serve_bodies import VALID, mutated
from llmopt.benchmarks.serve_fuzz import check
from llmopt.tests.server_helpers import Server, fake_model


def test_mutated_bodies():
    statuses = set()
    with Server(lambda source: fake_model(context_length=64)) as server:
        for path, body in VALID:
            assert server.post(path, body)[0] == 200, path
        for number in range(300):
            path, body, headers = mutated(random.Random(number))
            connection = server.connect()
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            fault = check(answer.status, answer.read())
            connection.close()
            assert not fault, (number, path, body[:500])
            statuses.add(answer.status)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    assert {200, 400} <= statuses


def test_the_check_can_fail():
    assert check(500, b"{}") and check(400, b"{}") and check(200, b'data: {"error": 1}')
    assert not check(400, b'{"error": {"message": "no", "type": "x"}}') and not check(200, b"{}")
