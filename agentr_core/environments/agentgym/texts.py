"""What the agent is told about each world: its actions and the form of a reply, in our own
words.
"""

from __future__ import annotations

_FORM = """\
Reply with one line of thought and one action, nothing else:
Thought: why this action
Action: the action"""

SCIWORLD = f"""\
You do experiments in a simulated house with a laboratory. You are told a task and what you see; do one thing a turn.
The actions are:
open OBJECT, close OBJECT, activate OBJECT, deactivate OBJECT
connect OBJECT to OBJECT, disconnect OBJECT
use OBJECT, use OBJECT on OBJECT
look around, look at OBJECT, look in CONTAINER, read OBJECT, examine OBJECT
move OBJECT to CONTAINER, pick up OBJECT, put down OBJECT
pour LIQUID into CONTAINER, dunk CONTAINER into LIQUID, mix CONTAINER
go to PLACE, eat OBJECT, flush OBJECT, wait, wait1, task, inventory
focus on OBJECT, which says that this is the object the task asks for; a wrong one ends all
{_FORM}"""

WEBSHOP = f"""\
You buy in a web shop what an instruction asks for. Each turn you see a page, its parts set apart by [SEP].
The actions are:
search[WORDS], on a page with a search bar
click[VALUE], where VALUE is a button, a product or an option of the page
Anything else does nothing. Choose the options that are wanted before you click[buy now].
{_FORM}"""

ALFWORLD = f"""\
You act in a household. You see where you are and what you are to do; each turn, do one thing.
At first you are shown which actions are possible; they change with what you do. "Nothing happened" means that an action
was not possible.
{_FORM}"""

BABYAI = f"""\
You walk through rooms to reach a goal. Each turn you see what is near, and which actions are possible.
The actions are:
turn left, turn right, move forward, toggle, which opens what is in front of you
go to OBJECT NUMBER, pickup OBJECT NUMBER
go through DOOR NUMBER, if it is open; toggle and go through DOOR NUMBER otherwise
A locked door needs a key of its colour.
{_FORM}"""

SEARCHQA = """\
You answer a question with the help of a search engine. Each turn, think first, then write one of the two:
<search>words to search for</search>
<answer>the answer, as short as can be</answer>
After a search you are shown passages. An answer ends the task."""

SQLGYM = """\
You are shown a database and a question. Think, then answer with one SQLite query on one line:
Thought: how the query finds it
Action: ```sql
SELECT ...
```"""

MAZE = f"""\
You look for the goal of a maze. Each turn you see where the goal is, where you are, and the walls around you. Positions
count rows downwards and columns to the right.
The actions are: move up, move down, move left, move right
{_FORM}"""

WORDLE = f"""\
You guess a hidden word of five letters, in six tries. Write a guess with spaces between its letters, such as c r a n e.
After each guess you see a letter for each letter: g for right, y for one that belongs elsewhere, b for one that is not
in the word.
{_FORM}"""

WEBARENA = """\
You use web sites to do what you are asked. Each turn you see the page as a tree in which elements have numbers.
The actions are:
click [NUMBER], hover [NUMBER], type [NUMBER] [TEXT] [0 or 1, whether to press enter after it]
press [KEYS], scroll [down or up]
new_tab, tab_focus [NUMBER], close_tab, goto [ADDRESS], go_back, go_forward
stop [ANSWER], when all is done
Think, then write one action between two rows of three backticks, such as ```click [12]```"""


def tools(what: str) -> str:
    """Return the instruction of a world with tools for `what`."""
    return f"""\
You reach a goal with tools for {what}. Each turn, call one tool, with its input as JSON:
Thought: why this tool
Action: TOOL with Action Input: {{"NAME": VALUE}}
check_valid_actions with Action Input: {{}} lists the tools.
finish with Action Input: {{"answer": VALUE}} ends the task."""
