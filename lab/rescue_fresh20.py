from lab.rescue import program

main = program(fresh_from=20)
