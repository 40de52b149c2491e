"""The page of settings, read off the configuration's types: name, default, bounds, meaning, and when a change is in force.

The meaning is the docstring under a field, so that whoever adds a setting writes it once, where it is defined.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy.site.text import cell, code, prose, table
from policies import reload
from policies.config import Config

_INTRO = """
The configuration is one YAML file, by default `./rewake.yaml`, else `/etc/rewake/rewake.yaml`. Every fault of a file is reported
at once, each with its path; an unknown setting is one. Sizes are bytes or `64 MiB`; times are seconds. `NAME` is a name that you
choose. `deploy/examples/rewake.yaml` shows every setting in its place.

After `rewake reload` a changed setting is in force **at once**; for replicas that start from now on (**next start**); or when
everything was stopped and is started again (**restart**). `gateway.tls` can be changed at once, but not switched on or off.
"""
_PLACE = "NAME"
"""What stands for the names that an operator chooses."""


def page() -> str:
    """Markdown."""
    parts = [
        "# Settings",
        _INTRO.strip(),
    ]
    for prefix, section, given in sections():
        title = f"`{prefix.rstrip('.')}`" if prefix else "At the top"
        said = docs(section)
        rows = [
            _row(prefix, name, facts, said, given) for name, facts in section.model_fields.items() if _shown(facts, name, said)
        ]
        if rows:
            parts += [f"## {title}", prose(inspect.getdoc(section) or ""), table(("setting", "default", "", "in force"), rows)]
    return "\n\n".join(parts) + "\n"


def docs(section: type[BaseModel]) -> Mapping[str, str]:
    """The docstring under each field of a section, those that it inherits included."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[name] = inspect.cleandoc(said)
    return found


def undocumented() -> list[str]:
    """Settings without a docstring."""
    return [
        f"{prefix}{name}"
        for prefix, section, _ in sections()
        for name, facts in section.model_fields.items()
        if name not in docs(section) and _inside(facts.annotation) is None
    ]


def sections(
    section: type[BaseModel] = Config, prefix: str = "", given: BaseModel | None = None
) -> Iterator[tuple[str, type[BaseModel], BaseModel | None]]:
    """Path, type, and the instance whose values are the defaults, if they are not the type's own."""
    yield prefix, section, given
    for name, facts in section.model_fields.items():
        inside = _inside(facts.annotation)
        if inside is not None:
            kind, suffix = inside
            default = facts.default if isinstance(facts.default, kind) else None
            yield from sections(kind, f"{prefix}{name}{suffix}.", default)


def _shown(facts: FieldInfo, name: str, said: Mapping[str, str]) -> bool:
    """A section gets a row of its own only where there is something to say of it as a whole."""
    return _inside(facts.annotation) is None or name in said


def _inside(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """The section that a field holds, and how its path goes on."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    suffix = f".{_PLACE}" if get_origin(annotation) in (Mapping, dict) else "[]" if get_origin(annotation) is tuple else ""
    for argument in get_args(annotation):
        found = _inside(argument)
        if found is not None:
            return found[0], suffix or found[1]
    return None


def _row(prefix: str, name: str, facts: FieldInfo, said: Mapping[str, str], given: BaseModel | None) -> tuple[str, ...]:
    inside, path = _inside(facts.annotation), f"{prefix}{name}"
    meaning = prose(said.get(name, ""))
    if inside is not None:
        meaning += f" See `{path}{inside[1]}`."
    default = facts.default if given is None else getattr(given, name)
    shown = "**must be given**" if facts.is_required() and given is None else _default(default)
    when = reload.when(path.replace(f".{_PLACE}", ".x"))
    return f"`{name}`", shown, cell(f"{meaning} {_limits(facts)}".strip()), when


def _limits(facts: FieldInfo) -> str:
    choices = _choices(facts.annotation)
    if choices:
        return f"*One of {', '.join(code(choice) for choice in choices)}.*"
    said = []
    for one in facts.metadata:
        match one:
            case annotated_types.Ge(ge=least) if least != 0:
                said.append(f"at least {least}")
            case annotated_types.Gt(gt=least):
                said.append(f"more than {least}")
            case annotated_types.Le(le=most):
                said.append(f"at most {most}")
            case annotated_types.Lt(lt=most):
                said.append(f"less than {most}")
    return f"*{', '.join(said).capitalize()}.*" if said else ""


def _choices(annotation: Any) -> tuple[object, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for one in get_args(annotation) if (found := _choices(one))), ())
    return ()


def _default(default: Any) -> str:
    if isinstance(default, bool):
        return code(str(default).lower())
    if isinstance(default, BaseModel) or default is None or default in ((), {}):
        return ""
    if isinstance(default, float):
        return code(f"{default:g}")
    if isinstance(default, int) and default >= 1 << 20 and default % (1 << 20) == 0:
        return code(f"{default >> 20} MiB")
    return cell("; ".join(code(one) for one in default)) if isinstance(default, tuple) else code(default)
