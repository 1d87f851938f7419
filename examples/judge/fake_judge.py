"""Stand in for a language model that judges: NOT a real one. It speaks OpenAI's chat completions on loopback.

It reads what a real judge would read, the text of the request, and follows the rubric as far as the rules below go. To
use a real judge, change base_url, model and key_env in config.yaml; nothing else knows of this file.
"""

import argparse
import json
import re
from itertools import pairwise
from typing import Any

import uvicorn
from fastapi import FastAPI

app = FastAPI()


def quality(answer: str, task: str, rubric: str) -> float:
    """Return the share of neighbours in order; 0 with other letters, if the rubric says that they matter."""
    if "all letters" in rubric and sorted(answer) != sorted(task.removeprefix("Sort: ")):
        return 0.0
    ordered = [first <= second for first, second in pairwise(answer)]
    return sum(ordered) / len(ordered) if ordered else 0.0


@app.post("/v1/chat/completions")
async def judge(request: dict[str, Any]) -> dict[str, Any]:
    text = request["messages"][-1]["content"]
    (task,), (rubric,), answers = (
        re.findall(rf"<{tag}.*?>\n(.*?)\n</{tag}", text, re.DOTALL) for tag in ("task", "rubric", "answer")
    )
    found = [quality(answer, task, rubric) for answer in answers]
    if "Rank the" in text:  # best first; Python's sort leaves equal ones as they stand
        ranking = sorted(range(1, len(found) + 1), key=lambda number: -found[number - 1])
        verdict: dict[str, Any] = {"reason": f"answer {ranking[0]} has most in order", "ranking": ranking}
    else:
        verdict = {"reason": f"{found[0]:.0%} of neighbours in order", "score": 10 * found[0]}
    message = {"role": "assistant", "content": json.dumps(verdict)}
    usage = {"prompt_tokens": len(text) // 4, "completion_tokens": 20}
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": message}], "usage": usage}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", nargs="?", type=int, default=8100, help="where it listens, 8100 by default")
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning")
