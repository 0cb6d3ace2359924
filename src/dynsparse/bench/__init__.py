"""The benchmark behind `dynsparse bench`: what is measured, beside what, and what follows from it.

`spec` reads the YAML file; `contenders`, `updates` and `training` do the work that is timed;
`timing` and `load` see to it that the times mean something; `law` and `results` say what they mean.
"""
