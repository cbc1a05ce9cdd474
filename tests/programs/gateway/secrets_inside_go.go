package main

import ("fmt"; "io"; "net/http"; "os")

func main() {
	asked, _ := http.NewRequest("GET", os.Args[1], nil)
	asked.Header.Set("X-Api-Key", os.Getenv("TOKEN"))
	answer, err := http.DefaultClient.Do(asked)
	if err != nil { fmt.Println(err); os.Exit(1) }
	body, _ := io.ReadAll(answer.Body)
	fmt.Println(string(body))
}
