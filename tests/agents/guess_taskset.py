"""A taskset of verifiers: say a word. Its third task cannot be scored."""

import verifiers.v1 as vf

__all__ = ["GuessTaskset"]


class GuessData(vf.TaskData):
    answer: str


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "fern":
            raise ValueError("no word of the taskset")
        return float(self.data.answer in trace.last_reply)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> list[GuessTask]:
        words = ("oak", "birch", "fern", "moss")
        return [GuessTask(GuessData(prompt=f"Say {word}.", answer=word), self.config.task) for word in words]
