"""Where tests found the judge before it moved to verify."""

from tests.flash_kernels import judge_first_served as judge_first_served
from verify.examination import Examination as Examination
