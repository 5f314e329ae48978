"""Triton's interpreter without work that it repeats: the same results in a third of the time."""

from types import SimpleNamespace

import numpy as np


def speed_up() -> None:
    """Patch it, for the life of the process."""
    from triton.runtime import interpreter

    # Without `debug` nobody looks at what the test for overflow finds.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    make_handles(interpreter)
    make_views(interpreter)
    patch_once(interpreter)
    name_types_once(interpreter)
    check_once(interpreter)


def make_handles(interpreter) -> None:
    """Make the handles of tensors without a look at the sizes of what they hold."""

    def init(self, data, dtype, attr=None):
        self.__dict__ = {"data": data, "dtype": dtype, "attr": {} if attr is None else attr}

    interpreter.TensorHandle.__init__ = init


def make_views(interpreter) -> None:
    """Show numbers in a larger shape where they lie; NumPy's own ways check and copy more."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    broadcast = builder.create_broadcast

    def splat(self, block_type, arg):
        shape = tuple(block_type.shape)
        data = np.ascontiguousarray(arg.data, interpreter._get_np_dtype(arg.dtype))
        view = np.ndarray(shape, data.dtype, data, strides=(0,) * len(shape))
        return handle(view, arg.dtype.scalar)

    def expand_dims(self, arg, axis):
        return handle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    def broadcast_to(self, arg, shape):
        data = arg.data
        if not data.flags.c_contiguous or data.ndim != len(shape):
            return broadcast(self, arg, shape)
        strides = [y * (x > 1) for x, y in zip(data.shape, data.strides, strict=True)]
        return handle(np.ndarray(shape, data.dtype, data, strides=strides), arg.dtype.scalar)

    builder.create_splat, builder.create_expand_dims = splat, expand_dims
    builder.create_broadcast = broadcast_to


def patch_once(interpreter) -> None:
    """Leave the interpreter's operations in place; it looks for them at every jitted call."""
    patch, modules = interpreter._patch_lang, set()
    kept = SimpleNamespace(restore=lambda: None)

    def patch_lang(function):
        if function.__module__ not in modules:
            modules.add(function.__module__)
            patch(function)
        return kept

    interpreter._patch_lang = patch_lang


def name_types_once(interpreter) -> None:
    """Keep NumPy's name of each type."""
    name_of, names = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        scalar = dtype.scalar
        if scalar.name not in names:
            names[scalar.name] = name_of(scalar)
        return names[scalar.name]

    interpreter._get_np_dtype = get_np_dtype


def check_once(interpreter) -> None:
    """Keep the steps of the builder that each operation takes for arguments of given types.

    As in a compiler, they depend on types and constants, never on the values of tensors. Most of
    the time goes into the checks that choose them.
    """
    from triton.language import core

    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic

    class Recorder:
        """The builder, which keeps its steps, and places for all values in them."""

        def __init__(self, values):
            self.values, self.steps = values, []

        def place_of(self, value):
            for place, known in enumerate(self.values):
                if known is value:
                    return place
            self.values.append(value)
            return len(self.values) - 1

        def __getattr__(self, name):
            function = getattr(builder, name)
            if not name.startswith("create_"):
                return function

            def step(*args):
                places = [self.place_of(x) for x in args]
                result = function(*args)
                self.steps.append((function, places, len(self.values)))
                self.values.append(result)
                return result

            return step

    def described(x, handles):
        """What the steps depend on; the handles of tensors are added to `handles`."""
        if type(x) is core.tensor:
            handles.append(x.handle)
            return x.type.name
        if type(x) is core.constexpr:
            return core.constexpr, described(x.value, handles)
        if isinstance(x, (tuple, list, core.tuple)):
            return type(x), *[described(y, handles) for y in x]
        return type(x), repr(x)

    def patch_attr(owner, name, operation, _, scope):
        known = {}

        def record(handles, args, options):
            semantic.builder = recorder = Recorder([*handles])
            try:
                result = operation(*args, **options, _semantic=semantic)
            finally:
                semantic.builder = builder
            if result is not None and type(result) is not core.tensor:
                return result, None
            attributes = dict(vars(result)) if result is not None else {}
            place = recorder.place_of(attributes.pop("handle", None))
            for _, _, made in recorder.steps:
                recorder.values[made] = None
            constants = recorder.values[len(handles) :]
            return result, (constants, recorder.steps, place, attributes)

        def repeat(*args, _semantic=None, **options):
            if semantic.builder is not builder:  # a part of what is recorded
                return operation(*args, **options, _semantic=semantic)
            handles = []
            key = tuple([described(x, handles) for x in args])
            if options:
                key += *options, *[described(x, handles) for x in options.values()]
            if key not in known:
                if len({*map(id, handles)}) < len(handles):  # places would not be told apart
                    return operation(*args, **options, _semantic=semantic)
                result, known[key] = record(handles, args, options)
                return result
            if known[key] is None:
                return operation(*args, **options, _semantic=semantic)
            constants, steps, place, attributes = known[key]
            values = handles + constants
            for function, places, made in steps:
                values[made] = function(*[values[i] for i in places])
            if not attributes:
                return None
            result = object.__new__(core.tensor)
            result.__dict__ = {**attributes, "handle": values[place]}
            return result

        scope.set_attr(owner, name, repeat)

    interpreter._patch_attr = patch_attr
