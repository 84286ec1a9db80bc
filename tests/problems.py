"""Where tests found the problems before they moved to verify."""

from verify.call import Call as Call
from verify.drawing import random_problem as random_problem
from verify.problems import KINDS as KINDS
from verify.problems import Problem as Problem
