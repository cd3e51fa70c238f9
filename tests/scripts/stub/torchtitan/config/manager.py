import importlib


class ConfigManager:
    """Parses `--module M --config FUNCTION --section.key value ...`. Values are Python expressions, and other words are
    strings."""

    def parse_args(self, arguments):
        options = dict(zip(arguments[::2], arguments[1::2]))
        module = importlib.import_module(options.pop("--module"))
        config = getattr(module, options.pop("--config"))()
        for option, word in options.items():
            *places, name = option.removeprefix("--").split(".")
            part = config
            for place in places:
                part = getattr(part, place)
            if not hasattr(part, name):
                raise ValueError(f"unknown option {option}")
            try:
                value = eval(word, {})
            except NameError:
                value = word
            setattr(part, name, value)
        return config
