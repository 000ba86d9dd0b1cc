"""Which packages a wheel holds: all of planner, and the data directory profiles/ as planner._profiles."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["planner", "planner.*"]), "planner._profiles"],
    package_dir={"planner._profiles": "profiles"},
    package_data={"planner": ["py.typed"], "planner._profiles": ["**/*.toml", "**/*.json", "**/*.csv", "**/*.md"]},
)
