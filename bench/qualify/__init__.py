"""What qualifies a build on a GPU: other projects' tests, random cases, sanitizers, and a model that answers.

Files with `test_theirs` or marked gpu are run by pytest, the others as `PYTHONPATH=tests python -m bench.qualify.NAME`, both
from the source tree's folder. Only test_*.py belong to the tests of every day.
"""
