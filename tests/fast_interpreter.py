"""Triton's interpreter without work that it repeats: the same results in half the time."""

from types import SimpleNamespace


def speed_up() -> None:
    """Patch it, for the life of the process."""
    from triton.language import core
    from triton.runtime import interpreter

    # Without `debug` nobody looks at what the test for overflow finds.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    patch_once(interpreter)
    name_types_once(interpreter)
    make_types_once(core)


def patch_once(interpreter) -> None:
    """Leave the interpreter's operations in place; it looks for them at every jitted call."""
    patch, modules = interpreter._patch_lang, set()

    def patch_lang(function):
        if function.__module__ not in modules:
            modules.add(function.__module__)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

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


def make_types_once(core) -> None:
    """Give blocks of one shape and type what the first of them computed; nobody changes it."""
    init_type, init_tensor = core.block_type.__init__, core.tensor.__init__
    types, tensors = {}, {}

    def block_type(self, element_ty, shape):
        key = element_ty.name, *(x.value if type(x) is core.constexpr else x for x in shape)
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def tensor(self, handle, type):
        key = type.name
        if key not in tensors:
            init_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.shape, self.numel = tensors[key]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
