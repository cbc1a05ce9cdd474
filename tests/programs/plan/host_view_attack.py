import errno, os
os.chdir('/data')
def attempt(name, action):
    try:
        action()
        print(name, 'done')
    except OSError as error:
        print(name, errno.errorcode[error.errno])
def write(path):
    with open(path, 'w') as file: file.write('evil')
attempt('work', lambda: write('result.txt'))
attempt('hook', lambda: write('.git/hooks/pre-commit'))
attempt('config', lambda: write('.git/config'))
attempt('commondir', lambda: write('.git/commondir'))
attempt('replace', lambda: (write('.git/n'), os.rename('.git/n', '.git/config')))
attempt('ancestor', lambda: os.rename('.git', '.git2'))
attempt('new', lambda: write('.mcp.json'))
attempt('folder', lambda: write('.vscode/tasks.json'))
attempt('unlink', lambda: os.unlink('.mcp.json'))
attempt('rmdir', lambda: os.rmdir('.vscode'))
attempt('shell', lambda: write('.bashrc'))
attempt('index', lambda: write('.git/index'))
attempt('hardlink', lambda: os.link('.git/config', 'cfg'))
