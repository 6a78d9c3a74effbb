"""LangChain's ChatOpenAI, a client that others wrote, against a server: whole answers, streams, tools, structured output.

pip install langchain-openai, in an environment with hf_paged
python scripts/clients/try_langchain.py

It starts a server of the demo model, which knows its stories and nothing of tools: calls and forms are forced.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_serve import start

ASKED = "Tell me a story"


@tool
def weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Story(BaseModel):
    """What a story is about."""

    hero: str = Field(max_length=20)
    happy: bool


def main() -> int:
    process, port = start([])
    try:
        models = [
            ChatOpenAI(
                model="demo", base_url=f"http://127.0.0.1:{port}/v1", api_key="none", temperature=0, max_tokens=120,
                use_responses_api=use_responses_api, max_retries=0, stream_usage=True,
            )
            for use_responses_api in (False, True)
        ]  # fmt: skip
        for model in models:
            print(f"/v1/{'responses' if model.use_responses_api else 'chat/completions'}")
            check(model)
        asyncio.run(check_async(models))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return 0


def check(model: ChatOpenAI) -> None:
    """Raise if an answer is not what LangChain promises of it."""
    whole = model.invoke(ASKED)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    print("  invoke:", repr(whole.text[:60]))
    chunks = list(model.stream(ASKED))
    assert "".join(each.text for each in chunks) == whole.text
    print(f"  stream: {len(chunks)} chunks")
    called = model.bind_tools([weather], tool_choice="weather", strict=True).invoke(
        "What is the weather in Paris?"
    )
    assert called.tool_calls, called
    [call] = called.tool_calls
    assert call["name"] == "weather"
    assert isinstance(call["args"]["city"], str)
    print("  tools:", call["args"])
    history = [
        HumanMessage(ASKED),
        called,
        ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]),
    ]
    assert isinstance(model.invoke(history), AIMessage)
    pieces = list(
        model.bind_tools([weather], tool_choice="weather", strict=True).stream(
            "What is the weather in Paris?"
        )
    )
    total = pieces[0]
    for each in pieces[1:]:
        total += each
    assert total.tool_calls[0]["args"] == call["args"]
    print("  tools, streamed")
    for method in ("json_schema", "function_calling"):
        story = model.with_structured_output(Story, method=method, strict=True).invoke(ASKED)
        assert isinstance(story, Story)
        print(f"  structured output by {method}:", story)


async def check_async(models: list[ChatOpenAI]) -> None:
    """The same of answers at once. LangChain shares connections between models, so one event loop has all."""
    for model in models:
        answers = await asyncio.gather(*(model.ainvoke(ASKED) for _ in range(4)))
        assert len({each.text for each in answers}) == 1
        batch = await model.abatch([ASKED, "Tell me another story"])
        assert batch[0].text == answers[0].text
    print("async, batch")


if __name__ == "__main__":
    sys.exit(main())
