"""Operators: found in a folder, built, loaded at first use, and what `ops/X.py` stands on.

Doors: `session` (the operators of one folder), `recipe` (how one is built), `frame` (for
`ops/X.py`, with `elementwise`, `shapes` and `node`, the quicker way in), `offered` (what an
operator adds to `loader`), `sharding` and `locally` (what it does with DTensors), `library`
(`loader.Library`), `schemas` (what torch knows of them), `rest` (what few calls need), `choices`
(which way calls take), `explain`, `new`.

Imports `build`, `cache`, `machine` and `errors`.
"""
