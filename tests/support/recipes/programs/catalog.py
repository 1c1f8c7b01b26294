"""The programs of `make recipes`, in the order in which they run.

Arguments make a run short, choose a model or a dataset, or a rate at which LoRA moves a random model; whatever else a
recipe has by default is left alone.
"""

from __future__ import annotations

from support.recipes.program import Program
from support.recipes.programs.command_lines import COMMAND_LINES
from support.recipes.programs.cookbook_tests import OWN_TESTS
from support.recipes.programs.games import GAMES
from support.recipes.programs.judgements import JUDGEMENTS
from support.recipes.programs.preferences import PREFERENCE
from support.recipes.programs.rewards import REWARD
from support.recipes.programs.samplers import SAVED_SAMPLERS
from support.recipes.programs.supervised import SUPERVISED
from support.recipes.programs.teachers import TEACHERS
from support.recipes.programs.third_parties import THIRD_PARTIES

TRAINING = (*SUPERVISED, *REWARD, *GAMES, *PREFERENCE, *TEACHERS, *JUDGEMENTS)
PROGRAMS: tuple[Program, ...] = (*TRAINING, *SAVED_SAMPLERS, *COMMAND_LINES, *OWN_TESTS, *THIRD_PARTIES)
