"""One line of comma-separated values, as spreadsheets write it."""


def split(line):
    """The fields of a line.

    A field may stand in double quotes; commas in it are then text, and two double quotes are one.
    """
    fields, field, quoted = [], "", False
    for character in line:
        if character == '"':
            quoted = not quoted
        elif character == ",":
            fields.append(field)
            field = ""
        else:
            field += character
    return fields


def join(fields):
    """A line that `split` takes apart into these fields again."""
    return ",".join(f'"{field}"' if "," in field else field for field in fields)
