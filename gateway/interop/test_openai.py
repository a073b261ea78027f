# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client, unmodified: embeddings and models."""

from __future__ import annotations

import asyncio

import openai
import pytest


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"http://{gateway.http}/v1", api_key="none", max_retries=0) as c:
        yield c


def test_embeddings_of_a_text_and_of_several(client):
    one = client.embeddings.create(model="embedder", input="grüße")  # the client asks for base64
    assert one.data[0].embedding == [3, 4, 7] and one.model == "embedder"
    assert one.usage.prompt_tokens == one.usage.total_tokens == 7
    many = client.embeddings.create(model="embedder", input=["x" * n for n in range(60)], encoding_format="float")
    assert [(d.index, d.embedding) for d in many.data] == [(n, [3, 4, n]) for n in range(60)]
    short = client.embeddings.create(model="embedder", input="abc", dimensions=2)
    assert short.data[0].embedding == pytest.approx([0.6, 0.8])


def test_the_asynchronous_client(gateway):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as c:
            return await asyncio.gather(*(c.embeddings.create(model="embedder", input="x" * n) for n in range(40)))

    assert [r.data[0].embedding[2] for r in asyncio.run(ask())] == list(range(40))


def test_models(client):
    assert "embedder" in [m.id for m in client.models.list()]
    assert client.models.retrieve("embedder").id == "embedder"
    with pytest.raises(openai.NotFoundError, match="none"):
        client.models.retrieve("none")


@pytest.mark.parametrize(
    ("error", "said", "more"),
    [
        (openai.NotFoundError, "none", {"model": "none", "input": "a"}),
        (openai.BadRequestError, "tokens are not taken", {"model": "embedder", "input": [1, 2]}),
        (openai.BadRequestError, "65 bytes", {"model": "embedder", "input": "x" * 65}),
        (openai.BadRequestError, "the model has 3", {"model": "embedder", "input": "x", "dimensions": 4}),
        (openai.BadRequestError, "makes no embeddings", {"model": "affine", "input": "x"}),
    ],
)
def test_errors_are_those_that_the_client_knows(client, error, said, more):
    with pytest.raises(error, match=said) as e:
        client.embeddings.create(**more)
    assert e.value.type == "invalid_request_error"
