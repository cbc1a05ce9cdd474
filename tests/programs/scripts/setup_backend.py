import os, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = "NAME-1-py3-none-any.whl", "NAME-1.dist-info"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.writestr("NAME.pth", os.path.abspath("src"))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: NAME\nVersion: 1\n")
        tags = "Generator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\n{tags}")
        wheel.writestr(f"{info}/RECORD", "")
        if "NAME" == "ringfence":
            command = zipfile.ZipInfo("NAME-1.data/scripts/ringfence")
            command.external_attr = 0o100755 << 16
            wheel.writestr(command, "#!python\nprint('the command runs')\n")
    return name
